"""Real servers as child processes of this one: for development, for the demo and for tests; never for production.

- `processes`: a supervisor that owns a directory (locked, with logs and process ids) and named children in it. However
  the supervisor ends, its children end too.
- `ports`: which port each child listens on, remembered from start to start.
- `zookeeper`: Apache ZooKeeper from the jars that PySpark ships.
- `postgres`: PostgreSQL from a package.
- `cluster`: ZooKeeper, coordinators and broker groups together.
"""

from __future__ import annotations
