"""Where Spark looks for data sources that nobody registered: makes `format("topics")` work by being installed."""

from contextlib import suppress

# Spark imports every such module, and one that fails hides all data sources, not only its own. Without the extra's
# packages there is no source; `topics.spark.register` then says what is missing.
with suppress(ImportError):
    from topics.spark.source import TopicsDataSource as DefaultSource

__all__ = ["DefaultSource"]
