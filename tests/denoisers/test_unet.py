"""The UNets' denoiser against diffusers' on tiny random weights."""

import dataclasses
import math

import pytest
import torch
from parity import error
from safetensors.torch import save_file

from calotype.core.attention.registry import attention_selector
from calotype.core.checkpoint import part_of
from calotype.core.copies import moved
from calotype.core.loading import build_on_meta
from calotype.denoisers.base import Conditioning
from calotype.denoisers.shapes import PREFIXES, Shapes
from calotype.denoisers.unet import UNetDenoiser, guidance_embedding, load_unet
from calotype.denoisers.unet_config import SD_1, SDXL, SDXL_REFINER, unet_config
from calotype.denoisers.unet_shapes import SD_MARKS, SDXL_MARKS, unet_config_of_shapes
from calotype.pipelines.finite import CheckedRunner, NonFiniteBlockError
from calotype.schedulers.discrete import DiscreteConfig, discrete_schedule

from .. import tiny_unet
from ..original_layouts import unet_names

KINDS = {"sd": tiny_unet.SD_1, "sdxl": tiny_unet.SDXL, "refiner": tiny_unet.REFINER}
POINTS = discrete_schedule(DiscreteConfig(scheduler="EulerDiscreteScheduler", beta_schedule="scaled_linear"), 3).points


@pytest.fixture(scope="module", params=list(KINDS))
def pair(request, tmp_path_factory):
    """Ours, theirs, and how many numbers they are told."""
    theirs = tiny_unet.unet(KINDS[request.param])
    folder = tmp_path_factory.mktemp("unet") / request.param
    theirs.save_pretrained(folder)
    return load_unet(folder, unet_config(theirs.config)), theirs, {"sd": 0, "sdxl": 6, "refiner": 5}[request.param]


def conditioning(config, rows, tokens, numbers, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (rows, numbers), generator=generator).float()
    return Conditioning(
        states=torch.randn(rows, tokens, config.text_width, generator=generator),
        lengths=torch.full((rows,), tokens),
        pooled=torch.randn(rows, config.pooled_width(numbers), generator=generator) if numbers else None,
        time_ids=ids if numbers else None,
    )


def slope(model, told, x, point, **options):
    prepared = model.prepare(told, tuple(x.shape), POINTS[:-1], attention=attention_selector(), **options)
    return model.slope(x, prepared, point)


def by_diffusers(model, told, x, point):
    scale = (point.sigma**2 + 1) ** 0.5
    added = None if told.time_ids is None else {"text_embeds": told.pooled, "time_ids": told.time_ids}
    read = x[:, :, 0] / scale
    if told.references:
        read = torch.cat((read, told.references[0][:, :, 0]), dim=1)
    out = model(
        read,
        torch.tensor(point.time),
        encoder_hidden_states=told.states,
        timestep_cond=None if told.guidance is None else guidance_embedding(told.guidance, 12).expand(len(x), -1),
        added_cond_kwargs=added,
    )
    return out.sample[:, :, None]


def noisy(rows, *cells, seed=1, sigma=3.0):
    return sigma * torch.randn(rows, 4, 1, *cells, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("cells", "tokens"), [((8, 8), 7), ((5, 7), 1), ((3, 9), 13)])
def test_slopes_are_those_of_diffusers(pair, cells, tokens):
    """Also at sizes that the levels do not halve evenly."""
    ours, theirs, numbers = pair
    told, x = conditioning(ours.config, 2, tokens, numbers), noisy(2, *cells)
    for point in POINTS[:-1]:
        assert error(slope(ours, told, x, point), by_diffusers(theirs, told, x, point)) < 1e-5


def test_v_prediction_becomes_a_slope(pair):
    """x0 = x - sigma slope is x_vp / sqrt(1 + sigma^2) - sigma v / sqrt(1 + sigma^2)."""
    ours, theirs, numbers = pair
    other = UNetDenoiser(ours.config, "v_prediction")
    other.unet = ours.unet
    told, x, point = conditioning(ours.config, 1, 4, numbers), noisy(1, 6, 4), POINTS[1]
    a = 1 / (1 + point.sigma**2)
    v = by_diffusers(theirs, told, x, point)
    x0 = math.sqrt(a) * (x * math.sqrt(a)) - math.sqrt(1 - a) * v
    assert error(x - point.sigma * slope(other, told, x, point), x0) < 1e-5


def test_a_row_is_that_row_alone(pair):
    """Also where its neighbour's text is longer."""
    ours, _, numbers = pair
    told, x = conditioning(ours.config, 3, 9, numbers), noisy(3, 4, 6)
    told = dataclasses.replace(told, lengths=torch.tensor([9, 4, 6]))
    together = slope(ours, told, x, POINTS[0])
    for row, length in enumerate((9, 4, 6)):
        alone = told.rows([row])
        alone = dataclasses.replace(alone, states=alone.states[:, :length])
        assert error(slope(ours, alone, x[row : row + 1], POINTS[0]), together[row : row + 1]) < 1e-5


def test_every_number_that_the_model_is_told_matters(pair):
    ours, _, numbers = pair
    told, x = conditioning(ours.config, 1, 4, numbers), noisy(1, 4, 4)
    plain = slope(ours, told, x, POINTS[1])
    for place in range(numbers):
        ids = told.time_ids.clone()
        ids[0, place] += 40
        assert error(slope(ours, dataclasses.replace(told, time_ids=ids), x, POINTS[1]), plain) > 1e-3


def test_guidance_value_and_further_channels():
    """Latent consistency models, and inpainting models."""
    entries = {**tiny_unet.SD_1, "time_cond_proj_dim": 12, "in_channels": 9}
    theirs, config = tiny_unet.unet(entries), unet_config(entries)
    ours = UNetDenoiser(config).eval()
    ours.unet.load_state_dict(theirs.state_dict())
    beside = torch.randn(2, 5, 1, 4, 6, generator=torch.Generator().manual_seed(3))
    told = dataclasses.replace(conditioning(config, 2, 5, 0), guidance=2.5, references=(beside,))
    x = noisy(2, 4, 6)
    with torch.no_grad():
        assert error(slope(ours, told, x, POINTS[1]), by_diffusers(theirs, told, x, POINTS[1])) < 1e-5
    for change, message in (({"guidance": None}, "needs a guidance value"), ({"references": ()}, "this model reads")):
        with pytest.raises(ValueError, match=message):
            slope(ours, dataclasses.replace(told, **change), x, POINTS[1])


def test_the_guidance_value_is_told_as_in_diffusers():
    from diffusers import StableDiffusionPipeline

    wanted = StableDiffusionPipeline.get_guidance_scale_embedding(None, torch.tensor([6.5]), embedding_dim=11)
    assert torch.allclose(guidance_embedding(7.5, 11), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": torch.zeros(2, 3, 5)}, "text states are 5 wide"),
        ({"lengths": torch.tensor([3]), "states": torch.zeros(1, 3, 72), "pooled": None, "time_ids": None}, "1 rows"),
        ({"pooled": None}, "pooled or time_ids are missing"),
        ({"time_ids": torch.zeros(2, 5)}, "told 5 time_ids and pooled text of width 24; .* of width 32"),
        ({"guidance": 2.0}, "takes no guidance value"),
        ({"references": (torch.zeros(2, 5, 1, 4, 4),)}, "this model reads none"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    ours = UNetDenoiser(unet_config(tiny_unet.SDXL))
    told = dataclasses.replace(conditioning(ours.config, 2, 3, 6), **change)
    with pytest.raises(ValueError, match=message):
        slope(ours, told, torch.zeros(2, 4, 1, 4, 4), POINTS[0])


def test_a_runner_is_refused_but_one_that_looks_on_names_the_part(pair):
    ours, _, numbers = pair
    told, x = conditioning(ours.config, 1, 3, numbers), noisy(1, 4, 4)

    def skipping(blocks, stream, prepared, cache):
        return stream

    with pytest.raises(ValueError, match="a UNet has none"):
        slope(ours, told, x, POINTS[0], runner=skipping)
    assert torch.equal(slope(ours, told, x, POINTS[0], runner=CheckedRunner()), slope(ours, told, x, POINTS[0]))
    broken = moved(ours, torch.device("cpu"), torch.float64)
    broken.unet.up_blocks[1].resnets[0].conv1.bias[0] = torch.inf
    with pytest.raises(NonFiniteBlockError, match="up block 1"):
        slope(broken, told, x, POINTS[0], runner=CheckedRunner())


def test_original_files_load_as_well(pair, tmp_path):
    """The weights written in the original layout, within a whole checkpoint, give the same parameters."""
    ours, theirs, _ = pair
    names = unet_names(ours.config)
    tensors = {f"model.diffusion_model.{names(key)}": tensor for key, tensor in theirs.state_dict().items()}
    others = {"first_stage_model.decoder.conv_in.weight": torch.zeros(2), "alphas_cumprod": torch.zeros(3)}
    save_file({**tensors, **others}, tmp_path / "model.safetensors")
    other = load_unet(part_of(tmp_path / "model.safetensors", PREFIXES), ours.config)
    with pytest.raises(ValueError, match=r"2 of \d+ keys match nothing"):
        load_unet(tmp_path / "model.safetensors", ours.config)
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize(
    ("config", "billions", "marks"),
    [(SD_1, 0.859520964, SD_MARKS), (SDXL, 2.567463684, SDXL_MARKS), (SDXL_REFINER, 2.25952666, SDXL_MARKS)],
    ids=["sd", "sdxl", "refiner"],
)
def test_the_presets_are_the_published_models(config, billions, marks):
    """By their number of parameters; names and shapes of either layout tell the config."""
    unet = build_on_meta(lambda: UNetDenoiser(config)).unet
    sizes = {name: tuple(parameter.shape) for name, parameter in unet.named_parameters()}
    assert sum(map(math.prod, sizes.values())) == round(billions * 1e9)
    rename = unet_names(config)
    for found in (sizes, {rename(name): shape for name, shape in sizes.items()}):
        other = unet_config_of_shapes(Shapes(found))
        assert build_on_meta(lambda other=other: UNetDenoiser(other)).unet.state_dict().keys() == sizes.keys()
        assert (other.attention_head_dim, other.sample_size) == (config.attention_head_dim, config.sample_size)
        assert [each.share(found) == 1.0 for each in (SD_MARKS, SDXL_MARKS)] == [marks is SD_MARKS, marks is SDXL_MARKS]


def test_entries_without_a_value_have_their_default():
    entries = {**tiny_unet.SD_1, "upcast_attention": None, "class_embed_type": None, "mid_block_type": None}
    config = unet_config({**entries, "dropout": 0.0, "_diffusers_version": "0.19.0"})
    assert config.upcast_attention is False
    assert config.mid_block_type is None


def test_shapes_of_something_else():
    with pytest.raises(ValueError, match="5 input_blocks do not make 2 levels of equal length"):
        unet_config_of_shapes(
            Shapes(
                {f"input_blocks.{i}.0.{'op' if i == 2 else 'x'}.weight": (1,) for i in (1, 2, 3, 4)}
                | {"input_blocks.0.0.weight": (8, 4, 3, 3)}
            )
        )


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"class_embed_type": "timestep"}, "class_embed_type is 'timestep'; there is nothing for that"),
        ({"addition_embed_type": "text"}, "addition_embed_type is 'text'; it must be null or 'text_time'"),
        ({"block_out_channels": "8"}, "block_out_channels is '8'; it must be a list of whole numbers over 0"),
        ({"in_channels": 3}, "in_channels is 3; it must be at least out_channels 4"),
        ({"down_block_types": ("AttnDownBlock2D",) * 3}, "a block is 'AttnDownBlock2D'; known are"),
        ({"_class_name": "UNet3DConditionModel"}, "_class_name is 'UNet3DConditionModel'"),
        ({"block_out_channels": (8, 16)}, "no UNet2DConditionModel can be made of this config"),
    ],
)
def test_configs_that_make_no_sense(entries, message):
    with pytest.raises(ValueError, match=message):
        UNetDenoiser(unet_config({**tiny_unet.SD_1, **entries}))
