#!/bin/bash
# On a Ray cluster that is running: 16 shards at a time, a GPU for each. The driver runs on the
# cluster; the folder is one that all its nodes see.
set -eu
ray job submit --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" -- \
    diffusax generate --prompts /shared/prompts.parquet --out /shared/pictures \
    --model stabilityai/stable-diffusion-xl-base-1.0 --dtype bfloat16 --format webdataset \
    --batch-size 8 --engine ray --ray-workers 16 --ray-resources GPU=1
