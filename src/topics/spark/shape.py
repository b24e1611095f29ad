"""`data` in another shape than text. Spark itself parses: faster than any Python, and part of its plans."""

from __future__ import annotations

from typing import Literal

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def parsed(
    rows: DataFrame, schema: str, mode: Literal["PERMISSIVE", "FAILFAST"] = "PERMISSIVE", column: str = "data"
) -> DataFrame:
    """`data` as the struct that a DDL schema describes: `parsed(df, "id INT, name STRING")`. Where the text does not
    fit, fields are null, or with `FAILFAST` the query fails. A tombstone's data stays null."""
    return rows.withColumn(column, f.from_json(f.col(column), schema, {"mode": mode}))


def as_variant(rows: DataFrame, column: str = "data") -> DataFrame:
    """`data` as VARIANT. It does not keep how a number was spelled, and has no place for a key that appears twice: such
    a row fails the query; keep the text where that matters."""
    return rows.withColumn(column, f.parse_json(f.col(column)))
