"""Decisions of a broker, as pure functions of state and event: replica, cursors, lease, resync, retention, room on disk."""
