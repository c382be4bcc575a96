"""Put trained weights together as a folder that `calotype.load` reads; the package's own is `plate/assets`.

    python -m calotype.plate.training.export --denoiser runs/denoiser/denoiser.safetensors \\
        --vae runs/vae/vae.safetensors --language runs/language/language.safetensors \\
        --tokenizer runs/language/tokenizer.json --out plate/assets

Weights are rounded to bfloat16. The latent preview, a linear map from a latent cell to its mean colour, is fitted here
by least squares and stored with the autoencoder. The same inputs always give the same bytes.
"""

import argparse
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.attention.registry import attention_selector
from ...core.checkpoint import file_digest, read_header
from ...core.loading import build_on_meta, load_weights, save_weights
from ...core.whole_file import whole_file
from ...denoisers.plate import PlateDenoiser, PlateDenoiserConfig
from ...language.model import LanguageModel
from ...language.tokenizer import load_tokenizer
from ...pipelines.plate import FAMILY, FILES, TextConfig, with_preview
from ...pipelines.recipe import Recipe
from ...vae.plate import PlateClipVAE, PlateClipVAEConfig, PlateVAE, PlateVAEConfig
from ...vae.preview import LatentPreview
from .captions import training_sample
from .courses import MAX_TOKENS
from .denoiser import LAYER
from .language import language_config
from .scenes import render

SCENES = 200  # that the preview is fitted to

RECIPE = Recipe(guidance_scale=1.5, shift=2.0)  # the better one of guidances 1.5 and 2 at 10 steps; shift 2 over 1


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a folder is made of; `tokenizer` is a file."""

    denoiser: PlateDenoiser
    vae: PlateVAE
    language: LanguageModel
    tokenizer: Path


def read_parts(denoiser: Path, vae: Path, language: Path, tokenizer: Path) -> Parts:
    """The parts in the sizes of the bundled model, from the files that the training scripts wrote; denoiser and
    autoencoder may have learnt clips.

    Raises:
        FileNotFoundError: a file is missing. ValueError: one does not fit, or the tokenizer is of another language
        model.
    """
    model = build_on_meta(lambda: LanguageModel(language_config(), attention=attention_selector()))
    parts = Parts(
        denoiser=build_on_meta(lambda: PlateDenoiser(PlateDenoiserConfig(frames=_frames(denoiser)))),
        vae=build_on_meta(lambda: _autoencoder(vae)),
        language=model,
        tokenizer=tokenizer,
    )
    for module, path in ((parts.denoiser, denoiser), (parts.vae, vae), (parts.language, language)):
        load_weights(module, path, dtype=torch.float32)
    return parts


def _frames(denoiser: Path) -> int:
    """Latent frames that a denoiser's file has embeddings for; the first frame has none."""
    embeddings = read_header(denoiser).tensors.get("frame")
    return 1 if embeddings is None else 1 + embeddings.shape[0]


def _autoencoder(vae: Path) -> PlateVAE:
    learnt = any(name.startswith("between.") for name in read_header(vae).tensors)
    return PlateClipVAE(PlateClipVAEConfig()) if learnt else PlateVAE(PlateVAEConfig())


def export(parts: Parts, folder: Path, *, scenes: int = SCENES) -> None:
    """Writes every file of the folder, which is made if need be.

    Raises:
        ValueError: the tokenizer and the language model do not belong together, or the folder cannot be written to.
    """
    check_vocabulary(parts)
    folder.mkdir(parents=True, exist_ok=True)
    preview = fit_preview(parts.vae, scenes)
    modules: dict[str, nn.Module] = {
        "denoiser": parts.denoiser,
        "vae": with_preview(parts.vae, preview),
        "language": parts.language,
    }
    for name, module in modules.items():
        metadata = {"family": FAMILY, "part": name, "license": "Apache-2.0"}
        save_weights(module, folder / f"{name}.safetensors", dtype=torch.bfloat16, metadata=metadata)
    _write(folder / "tokenizer.json", parts.tokenizer.read_text(encoding="utf-8"))
    _write(folder / "config.json", json.dumps(config(parts, folder), indent=2) + "\n")


def config(parts: Parts, folder: Path) -> dict[str, object]:
    """The entries of config.json, with the digests of the other files as they are in the folder."""
    return {
        "family": FAMILY,
        "denoiser": dataclasses.asdict(parts.denoiser.config),
        "vae": dataclasses.asdict(parts.vae.config),
        "language": dataclasses.asdict(parts.language.config),
        "text": dataclasses.asdict(TextConfig(layer=LAYER, normed=False, max_tokens=MAX_TOKENS)),
        "recipe": dataclasses.asdict(RECIPE),
        "sha256": {name: file_digest(folder / name) for name in FILES if name != "config.json"},
    }


def check_vocabulary(parts: Parts) -> None:
    """Makes sure that the language model has an embedding for every token.

    Raises:
        ValueError: it has not.
    """
    tokens = load_tokenizer(parts.tokenizer).raw.get_vocab_size()
    if tokens > parts.language.config.vocab_size:
        raise ValueError(
            f"{parts.tokenizer} has {tokens} tokens; the language model has {parts.language.config.vocab_size}"
        )


def fit_preview(vae: PlateVAE, scenes: int = SCENES, seed: int = 0) -> LatentPreview:
    """The linear map from a latent cell to the mean colour of its pixels with the least squared error over scenes."""
    random = np.random.default_rng(seed)
    latents: list[Tensor] = []
    colours: list[Tensor] = []
    for _ in range(scenes):
        picture = torch.from_numpy(render(training_sample(random).scene))
        pixels = picture.permute(2, 0, 1)[None].float() / 127.5 - 1  # [1, 3, H, W]
        with torch.no_grad():
            latents.append(vae.encode(pixels[:, :, None])[0].flatten(1).T)  # [h w, C]
        colours.append(functional.avg_pool2d(pixels, vae.downsampling)[0].flatten(1).T)  # [h w, 3]
    x = functional.pad(torch.cat(latents), (0, 1), value=1.0).double()
    solution = torch.linalg.lstsq(x, torch.cat(colours).double()).solution.float()  # [C + 1, 3]
    return LatentPreview(weight=solution[:-1].T.contiguous(), bias=solution[-1].contiguous())


def _write(path: Path, text: str) -> None:
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("denoiser", "vae", "language"):
        parser.add_argument(f"--{name}", type=Path, required=True, help=f"{name}.safetensors as its training wrote it")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--scenes", type=int, default=SCENES, help="scenes that the preview is fitted to")
    arguments = parser.parse_args()
    parts = read_parts(arguments.denoiser, arguments.vae, arguments.language, arguments.tokenizer)
    export(parts, arguments.out, scenes=arguments.scenes)
    sizes = {name: (arguments.out / name).stat().st_size / 1e6 for name in FILES}
    for name, size in sizes.items():
        print(f"{name}: {size:.2f} MB")
    print(f"{arguments.out}: {sum(sizes.values()):.2f} MB")


if __name__ == "__main__":
    main()
