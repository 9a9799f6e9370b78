"""All that dtf uses of private modules of Hydra and OmegaConf, which a new release may change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from omegaconf._utils import get_yaml_loader

if TYPE_CHECKING:
    from hydra._internal.hydra import Hydra

__all__ = [
    "BasicSweeper",
    "CachingConfigRepository",
    "Callbacks",
    "ConfigLoaderImpl",
    "ConfigRepository",
    "ConfigSearchPathImpl",
    "FileConfigSource",
    "ImportlibResourcesConfigSource",
    "SourcesRegistry",
    "get_yaml_loader",
    "hydra_app",
]


def hydra_app(loader: ConfigLoaderImpl) -> Hydra:
    """Hydra's application object, for `--info` and tab completion. Imported here: few commands need it."""
    from hydra._internal.hydra import Hydra

    return Hydra("dtf", loader)
