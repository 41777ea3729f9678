"""torch.distributed.elastic.metrics's names."""

from phalanx.elastic.metrics import api as api
from phalanx.elastic.metrics.api import *  # noqa: F403 - the names in its __all__
from phalanx.observe.metrics import initialize_metrics as initialize_metrics
