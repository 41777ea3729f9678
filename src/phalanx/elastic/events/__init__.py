"""Events, at torch's import path."""

from phalanx.elastic.events import api as api
from phalanx.elastic.events import handlers as handlers
from phalanx.observe.events import Event as Event
from phalanx.observe.events import EventMetadataValue as EventMetadataValue
from phalanx.observe.events import EventSource as EventSource
from phalanx.observe.events import NodeState as NodeState
from phalanx.observe.events import RdzvEvent as RdzvEvent
from phalanx.observe.events import construct_and_record_rdzv_event as construct_and_record_rdzv_event
from phalanx.observe.events import get_logging_handler as get_logging_handler
from phalanx.observe.events import record as record
from phalanx.observe.events import record_rdzv_event as record_rdzv_event
