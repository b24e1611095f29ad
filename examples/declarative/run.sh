#!/bin/sh
# Runs the project where it lies, with its storage and tables beside it (or in $STORAGE). A catalog that is on disk is what
# makes a second run possible: Spark's default one forgets its tables, and then finds their folders in its way.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
storage=${STORAGE:-$here/work}
mkdir -p "$storage"
cp -R "$here/transformations" "$storage/"
sed "s|^storage: .*|storage: file://$storage/checkpoints|" "$here/spark-pipeline.yml" > "$storage/spark-pipeline.yml"
cd "$storage"
exec spark-pipelines run --conf spark.sql.catalogImplementation=hive --spec "$storage/spark-pipeline.yml" "$@"
