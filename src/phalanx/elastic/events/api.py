"""The event types, at torch's import path."""

from phalanx.observe.events import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
