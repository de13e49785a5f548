"""Decisions of a broker, as pure functions of state and event: replica, cursors, resync, retention, room on disk."""
