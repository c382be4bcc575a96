"""The parts of one model from wherever they lie: a folder in diffusers' layout, single files, other folders."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..core.checkpoint import Within, part_of, read_checkpoint
from ..core.component_files import has_variant, refuse_quantised, weights_files
from ..core.config_sizes import check_config_sizes
from ..core.shapes import Shapes
from ..denoisers.shapes import PREFIXES as DENOISER_PREFIXES
from ..encoders.base import TextEncoder
from ..encoders.in_files import Inside, stored_encoder
from ..language.checkpoints import ModelSource
from ..vae.base import Autoencoder
from ..vae.kl_keys import PREFIXES
from .families import FolderFamily, family_of_folder
from .finder import Components, Finder
from .folders import is_diffusers
from .given import Given
from .parts import Layout, Places, place_of, places_of
from .recognise import check_denoiser
from .variants import check_variants

_PARTS = (
    *(*DENOISER_PREFIXES, *PREFIXES, "cond_stage_model.", "conditioner.", "text_encoders."),
    *("model_ema.", "loss.", "denoiser."),  # what was kept for training
)
"""What the names of tensors begin with in files that hold several parts; names without a dot are schedules and such."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "spiece.model")


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What was found of a model; None is what was not. `variant` picks files where a part has several."""

    family: FolderFamily
    source: Path
    denoiser: Path | None
    vae: Path | Autoencoder | None
    scheduler: Path | None
    encoders: Mapping[str, ModelSource | TextEncoder | None]
    tokenizers: Mapping[str, Path | None]
    others: Mapping[str, Path]
    variant: str | None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The folders and files of all parts that were found and are not loaded yet."""
        return places_of((self.denoiser, self.vae, *self.encoders.values(), *self.others.values()))

    @property
    def missing(self) -> tuple[str, ...]:
        """The parts that are needed and were not found: what each is and how it is given."""
        return tuple(part for _, part in self._missing)

    @property
    def advice(self) -> str:
        """What gives all that a single file lacks, where that is more than one keyword says; "" where it lacks
        nothing."""
        keywords = {keyword for keyword, _ in self._missing}
        if not keywords or is_diffusers(self.source):
            return ""
        ways = list[str]()
        if "encoders" in keywords:
            ways.append("as encoders= gives all encoders and tokenizers")
        elif "tokenizers" in keywords:
            ways.append("as tokenizers= gives all tokenizers")
        if "vae" in keywords:
            ways.append("as vae= the autoencoder" if ways else "as vae= gives the autoencoder")
        return f"a folder in diffusers' layout, or a hub id, {', '.join(ways)}"

    @property
    def _missing(self) -> tuple[tuple[str, str], ...]:
        """The keyword that gives each missing part ("" for none), and the part."""
        layout, found, may_lack = self.family.layout, list[tuple[str, str]](), self._may_lack
        if self.denoiser is None:
            found.append(("denoiser", self._word("the denoiser", layout.denoiser, "denoiser=file or folder")))
        for role, part in self.encoders.items():
            folder = layout.encoders[role]
            if part is None and folder not in may_lack:
                word = self._word(f"the text encoder {role!r}", folder, f"encoders={{{role!r}: folder}}")
                found.append(("encoders", word))
        for role, part in self.tokenizers.items():
            encoder = self.encoders[role]
            needed = place_of(encoder) is not None or (encoder is None and layout.encoders[role] not in may_lack)
            if part is None and needed:
                keyword = f"tokenizers={{{role!r}: folder}}"
                found.append(("tokenizers", self._word(f"the tokenizer of {role!r}", layout.tokenizers[role], keyword)))
        if layout.pictures is not None and layout.pictures[0] not in {*self.others, *may_lack}:
            word = "encoders=a folder in diffusers' layout that has one"
            found.append(("encoders", self._word("the picture encoder", layout.pictures[0], word)))
        if self.vae is None:
            found.append(("vae", self._word("the autoencoder", layout.vae, "vae=file or folder")))
        if self.scheduler is None and is_diffusers(self.source):
            found.append(("", f"folder {layout.scheduler!r}"))
        return tuple(found)

    @property
    def _may_lack(self) -> frozenset[str]:
        """Folders that this denoiser does without."""
        layout = self.family.layout
        if self.denoiser is None:
            return layout.may_lack
        files = weights_files(self.denoiser, self.variant)
        return layout.may_lack - layout.needed(Shapes.read(files, DENOISER_PREFIXES))

    def places(self) -> Places:
        """All parts, whose files have been looked at: headers, sizes, formats.

        Raises:
            FileNotFoundError: a part of a folder is missing, or no part comes in the variant. ValueError: a part that a
            single file lacks was not given, or a file is damaged or of a format that cannot be read.
        """
        self._refuse_missing()
        layout = self.family.layout
        assert self.denoiser is not None
        assert self.vae is not None
        places = Places(
            folder=self.source if is_diffusers(self.source) else None,
            denoiser=self.denoiser,
            vae=self.vae,
            scheduler=self.scheduler,
            encoders={role: part for role, part in self.encoders.items() if part is not None},
            tokenizers={role: part for role, part in self.tokenizers.items() if part is not None},
            others=self.others,
            variant=self.variant,
        )
        check_files(places)
        for name, place in {layout.denoiser: self.denoiser, **self.others}.items():
            if name in (layout.denoiser, layout.second):
                check_denoiser(place, self.variant, self.family)
        return places

    def _word(self, what: str, folder: str, keyword: str) -> str:
        return f"folder {folder!r} ({keyword} stands for it)" if is_diffusers(self.source) else f"{what} ({keyword})"

    @property
    def _held(self) -> str:
        """What the source has, of all parts."""
        places = {f"the text encoder {role!r}": place_of(part) for role, part in self.encoders.items()}
        found = [name for name, place in places.items() if place == self.source]
        found += ["the autoencoder"] if self.vae == self.source else []
        return " and ".join(filter(None, (", ".join(("the denoiser", *found[:-1])), *found[-1:])))

    def _refuse_missing(self) -> None:
        missing = self.missing
        if not missing:
            return
        if is_diffusers(self.source):
            lacks = ", and no ".join(missing)
            raise FileNotFoundError(f"{self.source} has no {lacks}; {self.family.title} needs all of its parts")
        lacks = f"missing are {', '.join(missing)}; {self.advice}"
        raise ValueError(f"{self.source} holds {self._held} of {self.family.title}; {lacks}")


def gather(source: Path, family: FolderFamily, given: Given, finder: Finder) -> Gathered:
    """The parts that are given, else those of `source`: a folder in diffusers' layout, or else a denoiser, beside which
    a file may hold other parts.

    Raises:
        FileNotFoundError, ValueError: a part that is given is not there, or is not what is needed; a file holds what is
        no part; a part comes only in variants, of which none is asked for.
    """
    if source.is_file():
        _refuse_strangers(source)
    layout, (encoders_given, tokenizers_given) = family.layout, given.of_roles(family.layout, family.title)
    search = _Search(
        source=source,
        family=family,
        given=given,
        finder=finder,
        encoders=_found(encoders_given, finder, _texts),
        tokenizers=cast("dict[str, Path]", _found(tokenizers_given, finder, _tokenizers)),
    )
    encoders = {role: search.encoder(role) for role in layout.encoders}
    found = Gathered(
        family=family,
        source=source,
        denoiser=search.denoiser() if is_diffusers(source) else source,
        vae=search.vae(),
        scheduler=search.inside(layout.scheduler),
        encoders=encoders,
        tokenizers={role: search.tokenizer(role) for role in layout.tokenizers},
        others={name: place for name in layout.others if (place := search.other(name)) is not None},
        variant=finder.variant,
    )
    for path in found.paths:
        if path.is_dir():
            check_variants(path, (file.name for file in path.iterdir()), found.variant)
    return found


def check_files(places: Places) -> None:
    """Looks at all headers and sizes, before anything is loaded.

    Raises:
        FileNotFoundError: a file is missing, or no part comes in the variant. ValueError: it is damaged, or of a format
        that cannot be read, or a config names sizes that its weights cannot have.
    """
    for path in places.paths:
        refuse_quantised(path)
        check_config_sizes(path, read_checkpoint(weights_files(path, places.variant)).values())
    check_variant(places.paths, places.variant)


def check_variant(paths: Iterable[Path], variant: str | None) -> None:
    """Raises FileNotFoundError where a variant is asked for, and the weights of none of the folders come in it."""
    folders = [path for path in paths if path.is_dir()]
    if variant is not None and not any(has_variant(folder, variant) for folder in folders):
        raise FileNotFoundError(f"none of {', '.join(map(str, folders))} has a variant {variant!r} of its weights")


@dataclass(frozen=True, kw_only=True)
class _Search:
    """`source` is a folder in diffusers' layout, which has what is not given, or else a denoiser."""

    source: Path
    family: FolderFamily
    given: Given
    finder: Finder
    encoders: Mapping[str, Path | TextEncoder]
    tokenizers: Mapping[str, Path]

    def inside(self, name: str) -> Path | None:
        """A component of the source."""
        return _folder(self.source / name) if is_diffusers(self.source) else None

    def other(self, name: str) -> Path | None:
        """A further network of the source; a picture encoder may be that of a folder that is given for the others."""
        found, pictures = self.inside(name), self.family.layout.pictures
        if found is not None or pictures is None or name != pictures[0]:
            return found
        given = (each for each in self.encoders.values() if isinstance(each, Path) and is_diffusers(each))
        return next((place for each in given if (place := _folder(each / name)) is not None), None)

    def denoiser(self) -> Path | None:
        if self.given.denoiser is None:
            return self.inside(self.family.layout.denoiser)
        path = self.finder.find(self.given.denoiser, lambda layout: (layout.denoiser,))
        return _folder(path / family_of_folder(path).layout.denoiser) if is_diffusers(path) else path

    def vae(self) -> Path | Autoencoder | None:
        given = self.given.vae
        if given is None:
            return self.source if _holds_autoencoder(self.source) else self.inside(self.family.layout.vae)
        if not isinstance(given, str | Path):
            return given
        path = self.finder.find(given, lambda layout: (layout.vae,))
        return _folder(path / family_of_folder(path).layout.vae) if is_diffusers(path) else path

    def encoder(self, role: str) -> ModelSource | TextEncoder | None:
        given, known = self.encoders.get(role), self.family.layout.inside.get(role, ())
        if given is None and self.source.is_file():
            return stored_encoder(self.source, known)
        if given is None:
            return self.inside(self.family.layout.encoders[role])
        if not isinstance(given, Path):
            return given
        if is_diffusers(given):
            return _of_role(given, role, "encoders")
        if given.is_file() and (found := stored_encoder(given, known)) is not None:
            return found
        path = self._of_one_role("encoders", self.given.encoders, given)
        return path if path.is_dir() else stored_encoder(path, [Inside("", each.entries) for each in known])

    def tokenizer(self, role: str) -> Path | None:
        """The one that is given, else that beside a given encoder, else the source's."""
        given, encoder = self.tokenizers.get(role), self.encoders.get(role)
        if given is not None and is_diffusers(given):
            return _of_role(given, role, "tokenizers")
        if given is not None and given.is_file():
            raise ValueError(f"tokenizers: {given} is a file; tokenizers are folders")
        if given is not None:
            return self._of_one_role("tokenizers", self.given.tokenizers, given)
        beside: Path | None = None
        if isinstance(encoder, Path):
            beside = _of_role(encoder, role, "tokenizers") if is_diffusers(encoder) else _with_tokenizer(encoder)
        return beside or self.inside(self.family.layout.tokenizers[role])

    def _of_one_role(self, keyword: str, given: object, path: Path) -> Path:
        """A folder or file of one part, which cannot stand for several."""
        if not isinstance(given, Mapping) and len(self.family.layout.encoders) > 1:
            roles = ", ".join(f"{each!r}: folder" for each in self.family.layout.encoders)
            raise ValueError(f"{keyword}: {path} is no folder in diffusers' layout; give {keyword}={{{roles}}}")
        return path


def _found(
    given: Mapping[str, str | Path | TextEncoder], finder: Finder, wanted: Components
) -> dict[str, Path | TextEncoder]:
    """What is given for roles, with ids and names looked up once each."""
    sources = {each for each in given.values() if isinstance(each, str | Path)}
    paths = {source: finder.find(source, wanted) for source in sorted(sources, key=str)}
    return {role: paths[each] if isinstance(each, str | Path) else each for role, each in given.items()}


def _texts(layout: Layout) -> tuple[str, ...]:
    return (*layout.encoders.values(), *layout.tokenizers.values(), *(layout.pictures or ()))


def _tokenizers(layout: Layout) -> tuple[str, ...]:
    return tuple(layout.tokenizers.values())


def _of_role(folder: Path, role: str, kind: str) -> Path | None:
    """The text encoder or tokenizer of a role in another folder in diffusers' layout."""
    layout = family_of_folder(folder).layout
    name = (layout.encoders if kind == "encoders" else layout.tokenizers).get(role)
    return None if name is None else _folder(folder / name)


def _folder(path: Path) -> Path | None:
    return path if path.is_dir() else None


def _with_tokenizer(folder: Path) -> Path | None:
    return folder if any((folder / name).is_file() for name in _TOKENIZER) else None


def _holds_autoencoder(source: Path) -> bool:
    """Whether a file is a whole checkpoint."""
    return source.is_file() and isinstance(part_of(weights_files(source), PREFIXES), Within)


def _refuse_strangers(source: Path) -> None:
    """Raises ValueError for a file of several parts with tensors that belong to none that is known."""
    names = read_checkpoint(weights_files(source))
    strangers = [name for name in names if "." in name and not name.startswith(_PARTS)]
    if strangers and any(name.startswith(DENOISER_PREFIXES) for name in names):
        raise ValueError(
            f"{source}: {len(strangers)} of {len(names)} tensors belong to no part that is known "
            f"({', '.join(strangers[:3])}); the names of parts begin with {', '.join(_PARTS)}"
        )
