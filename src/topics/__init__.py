"""topics: a durable event log in which no loss is ever silent."""

from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.limits import Limits
from topics.core.tombstone import Tombstone
from topics.engine.options import Options
from topics.log import Log
from topics.log import open_log as open

__all__ = ["Limits", "Log", "Options", "Tombstone", "TopicConfig", "TopicsError", "open"]
