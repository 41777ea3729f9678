"""torch.distributed.elastic.events's names."""

from phalanx.elastic.events import api as api
from phalanx.elastic.events import handlers as handlers
from phalanx.elastic.events.api import *  # noqa: F403 - the names in its __all__
from phalanx.elastic.events.handlers import *  # noqa: F403 - the same
from phalanx.observe.events import construct_and_record_rdzv_event as construct_and_record_rdzv_event
from phalanx.observe.events import record as record
from phalanx.observe.events import record_rdzv_event as record_rdzv_event
