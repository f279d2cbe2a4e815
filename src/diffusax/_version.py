"""The version, for those who need it without the rest."""

__version__ = "0.2.0.dev0"
