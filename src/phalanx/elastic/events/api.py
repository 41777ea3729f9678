"""torch.distributed.elastic.events.api's names."""

from phalanx.observe.events import Event, EventMetadataValue, EventSource, NodeState, RdzvEvent

__all__ = ["Event", "EventMetadataValue", "EventSource", "NodeState", "RdzvEvent"]
