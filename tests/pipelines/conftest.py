"""What several files of tests share."""

import pytest

from ..tiny_ltx_pipeline import LTXPipelines
from ..tiny_wan_pipeline import WanPipelines


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> WanPipelines:
    """Tiny pipelines of Wan's kinds."""
    return WanPipelines(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def ltx(tmp_path_factory: pytest.TempPathFactory) -> LTXPipelines:
    """Tiny pipelines of LTX-Video's kinds."""
    return LTXPipelines(tmp_path_factory.mktemp("ltx"))
