"""The options of a diffusers `scheduler_config.json`, read strictly."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar, cast, get_args

from .spacing import Spread

Word = TypeVar("Word", bound=str)

# Every option of the schedulers that checkpoints name. A file may hold some of another class's (a checkpoint whose
# scheduler was exchanged): they have no effect there, in diffusers too.
_OPTIONS = frozenset(
    (
        *("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "prediction_type"),
        *("timestep_spacing", "steps_offset", "rescale_betas_zero_snr", "interpolation_type", "timestep_type"),
        *("sigma_min", "sigma_max", "final_sigmas_type", "use_karras_sigmas", "use_exponential_sigmas"),
        *("use_beta_sigmas", "clip_sample", "clip_sample_range", "thresholding", "dynamic_thresholding_ratio"),
        *("sample_max_value", "set_alpha_to_one", "skip_prk_steps", "original_inference_steps", "timestep_scaling"),
        *("solver_order", "solver_type", "algorithm_type", "lower_order_final", "euler_at_final", "use_lu_lambdas"),
        *("use_flow_sigmas", "flow_shift", "lambda_min_clipped", "variance_type", "use_dynamic_shifting"),
        *("time_shift_type", "shift", "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len"),
        *("invert_sigmas", "shift_terminal", "stochastic_sampling", "predict_x0", "disable_corrector", "solver_p"),
        *("sigma_data", "sigma_schedule", "rho"),
    )
)


@dataclass(frozen=True, kw_only=True)
class Entries:
    """The options of one scheduler class. A missing or null option has its default."""

    scheduler: str
    options: Mapping[str, object]

    @classmethod
    def of(cls, entries: Mapping[str, object], supported: Collection[str]) -> Self:
        """The entries of a file whose class is one of `supported`.

        Raises:
            ValueError: no class or another one, or an option that no scheduler here knows and that is not off.
        """
        name = entries.get("_class_name")
        if not isinstance(name, str) or name not in supported:
            said = "no _class_name" if name is None else repr(name)
            raise ValueError(f"scheduler_config.json names {said}: supported are {', '.join(supported)}")
        for option, value in entries.items():
            if option not in _OPTIONS and not option.startswith("_") and value is not None and value is not False:
                near = difflib.get_close_matches(option, _OPTIONS, 1)
                hint = f" (nearest: {near[0]})" if near else ""
                raise ValueError(f"{name}: unknown option {option!r} = {value!r}{hint}; it could change the result")
        return cls(scheduler=name, options=dict(entries))

    def number(self, option: str, default: float) -> float:
        """A number."""
        value = self.optional_number(option)
        return default if value is None else value

    def optional_number(self, option: str) -> float | None:
        """A number, or None."""
        value = self.options.get(option)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise self._wrong(option, "a number")
        return None if value is None else float(value)

    def numbers(self, option: str) -> tuple[float, ...] | None:
        """Numbers, or None."""
        value = self.options.get(option)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._wrong(option, "a list of numbers")
        items = cast(Sequence[object], value)
        if any(isinstance(item, bool) or not isinstance(item, int | float) for item in items):
            raise self._wrong(option, "a list of numbers")
        return tuple(float(item) for item in cast(Sequence[float], items))

    def whole(self, option: str, default: int) -> int:
        """A whole number."""
        value = self.options.get(option)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(option, "a whole number")
        return value

    def switch(self, option: str, default: bool) -> bool:
        """True or false."""
        value = self.options.get(option)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(option, "true or false")
        return value

    def word(self, option: str, allowed: Collection[Word], default: Word) -> Word:
        """One of `allowed`."""
        value = self.options.get(option)
        if value is None:
            return default
        for word in allowed:
            if value == word:
                return word
        raise self._wrong(option, f"one of {', '.join(allowed)}")

    def spread(self) -> Spread | None:
        """Which of `use_karras_sigmas` and `use_exponential_sigmas` is on."""
        names: tuple[Spread, ...] = get_args(Spread)
        on: list[Spread] = [name for name in names if self.switch(f"use_{name}_sigmas", False)]
        if len(on) > 1:
            raise ValueError(f"{self.scheduler}: use_karras_sigmas and use_exponential_sigmas are both on")
        return on[0] if on else None

    def without(self, *options: str) -> None:
        """Refuse options that change the result and that there is nothing for here, unless they are off."""
        for option in options:
            if self.options.get(option):
                raise ValueError(f"{self.scheduler}: {option} = {self.options[option]!r} is not supported")

    def require(self, option: str, allowed: Collection[object], default: object) -> None:
        """Refuse every value of an option but the `allowed` ones."""
        value = self.options.get(option)
        if (default if value is None else value) not in allowed:
            texts = ", ".join(repr(each) for each in allowed)
            said = repr(default if value is None else value)
            raise ValueError(f"{self.scheduler}: {option} = {said} is not supported: only {texts}")

    def _wrong(self, option: str, kind: str) -> ValueError:
        return ValueError(f"{self.scheduler}: {option} must be {kind}, got {self.options[option]!r}")
