"""Which tile size suits this CPU: products and elementwise passes of the chunked sweep.

    python benchmarks/tiles.py

Prints, for each tile (n, m) at D = 512 in fp32, the speed of the products against a large matrix
product of the same run, and nanoseconds per pair of one pass of exp, exp2, sums and a product.
"""

import torch

from tilewise.measure import gemm_tflops, median_s

DIM = 512
TILES = [(256, 512), (512, 1024), (1024, 1024), (1024, 2048), (2048, 2048), (256, 4096)]


def measure(n: int, m: int, ceiling_tflops: float) -> str:
    """One line for a tile of n rows and m columns."""
    left, right, z = torch.randn(n, DIM), torch.randn(m, DIM), torch.empty(n, m)
    d_left, d_right, weight = torch.zeros(n, DIM), torch.zeros(m, DIM), torch.rand(n, m)
    products = (
        lambda: torch.mm(left, right.t(), out=z),
        lambda: d_left.addmm_(z, right),
        lambda: d_right.addmm_(z.t(), left),
    )
    ideal_s = 2 * n * m * DIM / ceiling_tflops / 1e12
    speeds = [ideal_s / median_s(call, 7) for call in products]
    z.zero_()
    passes = {
        "exp": lambda: torch.exp(weight, out=z),
        "exp2": lambda: torch.exp2(weight, out=z),
        "row sum": lambda: z.sum(1),
        "column sum": lambda: z.sum(0),
        "multiply": lambda: z.mul_(weight),
    }
    times = {name: 1e9 * median_s(call, 7) / (n * m) for name, call in passes.items()}
    words = "  ".join(f"{name} {ns:.2f}" for name, ns in times.items())
    return f"{n:5} x {m:5}  products " + " ".join(f"{x:.2f}" for x in speeds) + f"  ns: {words}"


if __name__ == "__main__":
    ceiling = gemm_tflops(torch.device("cpu"), torch.float32)
    product_ns = 2 * DIM / ceiling / 1e3
    print(f"matrix product 4096^3: {ceiling:.3f} TFLOP/s, {product_ns:.2f} ns per pair and product")
    for tile in TILES:
        print(measure(*tile, ceiling))
