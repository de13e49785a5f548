"""See `tests.databases`."""

from tests.databases import new_database, postgres_server

__all__ = ["new_database", "postgres_server"]
