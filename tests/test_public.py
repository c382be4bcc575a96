import pytest

import calotype


def test_every_public_name_is_there():
    for name in calotype.__all__:
        assert getattr(calotype, name) is not None
    assert dir(calotype) == sorted(calotype.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        calotype.nothing  # type: ignore[attr-defined]  # noqa: B018
