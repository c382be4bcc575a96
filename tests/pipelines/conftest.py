"""What several files of tests share."""

import pytest

from ..tiny_wan_pipeline import WanPipelines


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> WanPipelines:
    """Tiny pipelines of Wan's kinds."""
    return WanPipelines(tmp_path_factory.mktemp("wan"))
