"""The setting that names the directory of the catalogue, and the catalogue it selects."""

from pathlib import Path

from pydantic import BaseModel, Field

from onceward_services.walk.catalogue import Catalogue, load_catalogue

__all__ = ["CatalogueSettings"]


class CatalogueSettings(BaseModel):
    """Part of the settings of tree and steps: both need the catalogue."""

    walk_catalogue_dir: Path | None = Field(
        None, description="a directory with nodes.toml and quests.toml"
    )

    @property
    def catalogue(self) -> Catalogue:
        """The nodes and quests of this server. Raises ``ConfigurationError``."""
        return load_catalogue(self.walk_catalogue_dir)
