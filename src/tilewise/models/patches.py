"""Convolutions that cut an image into patches, as the matrix products that they are."""

from torch import Tensor, nn
from torch.nn import functional


class Patches(nn.Conv2d):
    """A convolution whose stride is its kernel: (n, C, H, W) -> (n, width, h, w), in one product.

    cuDNN multiplies patches of three channels in bf16 without tensor cores, forward and backward.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Of whole patches; what is left at the right and below is dropped, as by a convolution."""
        (height, width), weight = self.kernel_size, self.weight.flatten(1)
        down, across = input.shape[-2] // height, input.shape[-1] // width
        if input.dim() != 4 or not (down and across):
            return super().forward(input)
        whole = input[:, :, : down * height, : across * width]
        cut = whole.unflatten(3, (across, width)).unflatten(2, (down, height))
        rows = cut.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (n, h, w, numbers of a patch)
        return functional.linear(rows, weight, self.bias).permute(0, 3, 1, 2)


def multiply_patches(model: nn.Module) -> None:
    """Compute every convolution of pixels that has such a stride in this way."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _cuts_pixels(module):
            # In place: names, weights and whoever holds it stay the same.
            module.__class__ = Patches


def _cuts_pixels(conv: nn.Conv2d) -> bool:
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.padding in ("valid", (0, 0))
    return plain and conv.in_channels <= 4 and conv.kernel_size == conv.stride != (1, 1)
