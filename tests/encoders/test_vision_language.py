"""Qwen2.5-VL with pictures against transformers, and against what diffusers' Qwen-Image-Edit-Plus makes of it."""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_decoders as tiny
import torch
from parity import error
from safetensors.torch import load_file, save_file
from torch import Tensor

from calotype.core.attention.registry import attention_selector
from calotype.core.copies import moved
from calotype.encoders.qwen_vl_pictures import PictureReader
from calotype.encoders.qwen_vl_vision import VisionConfig, load_vision_tower
from calotype.encoders.vision_language import VisionLanguageEncoder, axes_positions, load_vision_language_encoder

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SIZES = ((300, 140), (30, 41), (112, 112), (190, 113))
PROMPTS = ["make the fox red and the grass old", "", "two dogs"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The same weights and files in both libraries."""

    model: Any
    tokenizer: Any
    folder: Path
    ours: VisionLanguageEncoder


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder, tokenizer = tmp_path_factory.mktemp("edit"), tiny.qwen_tokenizer()
    model = tiny.qwen_vl(tokenizer)
    model.save_pretrained(folder / "text_encoder")
    tokenizer.save_pretrained(folder / "processor")
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(tiny.READS))
    ours = load_vision_language_encoder(folder / "text_encoder", folder / "processor")
    return Pair(model=model, tokenizer=tokenizer, folder=folder, ours=ours)


def _picture(height: int, width: int) -> Tensor:
    """Smooth colours in 8 bits."""
    y, x = torch.linspace(0, 1, height)[:, None], torch.linspace(0, 1, width)
    channels = (y * x, (9 * y + 5 * x).sin() / 2 + 0.5, (0.3 * y + 0.7 * x).expand(height, width))
    return (torch.stack(channels) * 255).round() / 255


PICTURES = [_picture(*size) for size in SIZES]
LISTS = [[PICTURES[0], PICTURES[1]], [], [PICTURES[3]]]


def _reference(pair: Pair, prompt: str, pictures: Sequence[Tensor], *, axes: bool) -> Tensor:
    """The states of one prompt, as diffusers asks for them; with `axes`, transformers is told what is a picture."""
    from diffusers import QwenImageEditPlusPipeline

    class Told(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.dtype = pair.model.config, torch.float32

        def forward(self, input_ids: Tensor, **others: Any) -> Any:
            kinds = {"mm_token_type_ids": (input_ids == self.config.image_token_id).int()} if axes else {}
            return pair.model(input_ids=input_ids, **kinds, **others)

    others = dict.fromkeys(("scheduler", "vae", "transformer"))
    pipe = QwenImageEditPlusPipeline(
        text_encoder=Told(), tokenizer=pair.tokenizer, processor=tiny.QwenVLProcessor(pair.tokenizer), **others
    )
    images = [_to_pil(picture) for picture in pictures] or None
    states, mask = pipe.encode_prompt([prompt], images, device="cpu")
    assert mask is None
    return states


def _to_pil(picture: Tensor) -> Any:
    from PIL import Image

    return Image.fromarray((picture * 255).round().to(torch.uint8).permute(1, 2, 0).numpy())


@pytest.mark.parametrize("positions", ["axes", "diffusers"])
def test_states_are_those_of_the_reference(pair: Pair, positions: Any) -> None:
    ours = dataclasses.replace(pair.ours, positions=positions)
    found = ours(PROMPTS, LISTS)
    for row, (prompt, pictures) in enumerate(zip(PROMPTS, LISTS, strict=True)):
        expected, length = _reference(pair, prompt, pictures, axes=positions == "axes"), int(found.lengths[row])
        assert error(found.states[row : row + 1, :length], expected) <= 1e-5
        assert not found.states[row, length:].any()
    assert found.warnings == ()


def test_positions_matter_where_there_are_pictures(pair: Pair) -> None:
    other = dataclasses.replace(pair.ours, positions="diffusers")
    ours, theirs = pair.ours(PROMPTS, LISTS).states, other(PROMPTS, LISTS).states
    assert error(ours[:1], theirs[:1]) > 1e-3
    assert torch.equal(ours[1], theirs[1])


def test_rows_do_not_see_each_other(pair: Pair) -> None:
    together = pair.ours(PROMPTS, LISTS)
    for row, (prompt, pictures) in enumerate(zip(PROMPTS, LISTS, strict=True)):
        alone, length = pair.ours([prompt], [pictures]), int(together.lengths[row])
        assert alone.lengths.tolist() == [length]
        assert error(alone.states, together.states[row : row + 1, :length]) <= 1e-5
    without = pair.ours(["", "two dogs"])
    assert (
        error(without.states[:1, : int(without.lengths[0])], together.states[1:2, : int(together.lengths[1])]) <= 1e-5
    )


def test_a_picture_is_told_apart_by_its_place_and_its_content(pair: Pair) -> None:
    one, other = PICTURES[2], PICTURES[2].flip(1)
    states = pair.ours(["a fox"] * 3, [[one, other], [other, one], [one, one]]).states
    assert error(states[:1], states[1:2]) > 1e-3
    assert error(states[:1], states[2:]) > 1e-3


def test_the_vision_tower(pair: Pair) -> None:
    cut = [pair.ours.reader(picture) for picture in PICTURES]
    grids = [each.grid for each in cut]
    assert any(rows % 8 or columns % 8 for rows, columns in grids)  # not whole windows
    patches = torch.cat([each.patches for each in cut])
    ours = pair.ours.vision(patches, grids)
    visual = pair.model.model.visual
    expected = visual(patches, grid_thw=torch.tensor([[1, *grid] for grid in grids])).pooler_output
    assert error(ours[None], expected[None]) <= 1e-5
    alone = torch.cat([pair.ours.vision(each.patches, [each.grid]) for each in cut])
    assert error(ours[None], alone[None]) <= 1e-5


@pytest.mark.parametrize("size", [*SIZES, (29, 2000), (28, 28), (7, 9), (1000, 1001)])
def test_pictures_are_cut_as_by_the_reference(size: tuple[int, int]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    picture = _picture(*size)
    for settings in (tiny.READS, {"patch_size": 6, "merge_size": 3, "temporal_patch_size": 1}):
        found = PictureReader.from_entries(settings)(picture)
        expected = Qwen2VLImageProcessorPil(**settings)(images=[_to_pil(picture)], return_tensors="pt")
        assert [1, *found.grid] == expected["image_grid_thw"][0].tolist()
        assert torch.allclose(found.patches, expected["pixel_values"], atol=1e-5)


def test_positions_over_three_axes(pair: Pair) -> None:
    row, grids = [5, 9, 9, 9, 9, 9, 9, 5, 9, 9, 5, 5], [(3, 2), (1, 2)]
    types = torch.tensor([[int(token == 9) for token in row]])
    expected, _ = pair.model.model.get_rope_index(
        torch.tensor([row]), types, torch.tensor([[1, 2 * height, 2 * width] for height, width in grids])
    )
    assert axes_positions(row, 9, grids).T.tolist() == expected[:, 0].tolist()


def test_what_cannot_be(pair: Pair, tmp_path: Path) -> None:
    for prompts, pictures, message in (
        ([], [], "no prompts"),
        (["a"], [], "0 lists of pictures for 1 prompts"),
        (["<|image_pad|>"], [[]], "stands for a picture"),
        (["a"], [[torch.zeros(1, 30, 30)]], r"must be \[3, H, W\]"),
        (["a"], [[torch.zeros(3, 1, 201)]], "200 times the other"),
    ):
        with pytest.raises(ValueError, match=message):
            pair.ours(prompts, pictures)
    short = dataclasses.replace(pair.ours, text=pair.ours.text.with_max_tokens(20))
    with pytest.raises(ValueError, match="1 pictures do not fit in the 20 tokens"):
        short(["a"], [[PICTURES[0]]])
    with pytest.raises(ValueError, match="positions is 'flat'"):
        dataclasses.replace(pair.ours, positions="flat")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="does not cut pictures as"):
        dataclasses.replace(pair.ours, reader=PictureReader(patch=16))
    with pytest.raises(FileNotFoundError, match=r"preprocessor_config\.json"):
        load_vision_language_encoder(pair.folder / "text_encoder", tmp_path)
    for entries, message in (
        ({"do_normalize": False}, "do_normalize"),
        ({"resample": 2}, "bicubic"),
        ({"image_mean": [1]}, "image_mean"),
    ):
        with pytest.raises(ValueError, match=message):
            PictureReader.from_entries(entries)
    for entries, message in (({}, "vision_config is None"), ({"vision_config": {"hidden_size": 20}}, "20 in fours")):
        with pytest.raises(ValueError, match=message):
            VisionConfig.from_entries(entries)


def test_a_long_prompt_after_pictures_is_cut_and_told(pair: Pair) -> None:
    num_tokens = 40
    short = dataclasses.replace(pair.ours, text=pair.ours.text.with_max_tokens(num_tokens))
    found = short([tiny.LONG], [[PICTURES[1]]])
    (told,) = found.warnings
    assert tiny.LONG.endswith(told.partition("left out: '")[2].removesuffix("'"))
    whole = pair.ours([tiny.LONG], [[PICTURES[1]]])
    assert whole.warnings == ()
    assert error(found.states, whole.states[:, :num_tokens]) <= 1e-5


def test_weights(pair: Pair, tmp_path: Path) -> None:
    source = pair.folder / "text_encoder"
    weights = load_file(source / "model.safetensors")
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    for change in (("model.visual.", "visual."), ("visual.", "model.visual.")):
        if not any(name.startswith(change[0]) for name in weights):
            continue
        names = {name: name.replace(*change).replace("model.language_model.", "model.") for name in weights}
        save_file({names[name]: weight for name, weight in weights.items()}, tmp_path / "model.safetensors")
        options: dict[str, Any] = {"device": "cpu", "dtype": torch.float32, "attention": attention_selector()}
        tower, _ = load_vision_tower(tmp_path, **options)
        seen = pair.ours.reader(PICTURES[1])
        assert torch.equal(tower(seen.patches, [seen.grid]), pair.ours.vision(seen.patches, [seen.grid]))
        stem = next(name for name in names.values() if "merger.ln_q" in name).partition("merger")[0]
        extra = {stem + "blocks.0.extra": torch.zeros(2)}
        save_file(
            {**{names[name]: weight for name, weight in weights.items()}, **extra}, tmp_path / "model.safetensors"
        )
        with pytest.raises(ValueError, match="match nothing"):
            load_vision_tower(tmp_path, **options)


def test_copies_and_weights_that_stay_in_the_files(pair: Pair) -> None:
    half = moved(pair.ours, torch.device("cpu"), torch.bfloat16)
    assert half(PROMPTS, LISTS).states.dtype is torch.bfloat16
    assert half.language_model is not pair.ours.language_model
    stored = load_vision_language_encoder(pair.folder / "text_encoder", pair.folder / "processor", device="meta")
    assert torch.equal(stored(PROMPTS, LISTS).states, pair.ours(PROMPTS, LISTS).states)
    assert stored.vision.patch.weight.is_meta and stored.language_model.embedding.weight.is_meta
