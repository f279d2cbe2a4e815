#!/bin/bash
# On a TPU slice: a process for each chip of each host, which know nothing of each other. OUT is a
# folder that all hosts see, such as a mounted Filestore share. To be started on all hosts:
#
#   gcloud compute tpus tpu-vm ssh NAME --zone ZONE --worker all --command 'bash tpu_pod.sh'
set -u
CHIPS=${CHIPS:-4}              # of a host
HOSTS=${HOSTS:-4}              # of the slice
HOST=${TPU_WORKER_ID:-$(hostname | sed 's/.*-w-//')}
OUT=${OUT:-/mnt/share/pictures}
export JAX_COMPILATION_CACHE_DIR=/mnt/share/jax-cache

# A signal is passed on, so that each process finishes its batch.
trap 'kill -TERM $(jobs -p)' TERM INT
for ((chip = 0; chip < CHIPS; chip++)); do
    TPU_VISIBLE_CHIPS=$chip TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1 TPU_PROCESS_BOUNDS=1,1,1 \
        diffusax generate --prompts /mnt/share/prompts.parquet --out "$OUT" \
        --model stabilityai/stable-diffusion-xl-base-1.0 --dtype bfloat16 --format webdataset \
        --batch-size 8 --shard "$((HOST * CHIPS + chip))/$((HOSTS * CHIPS))" &
done
# The signal ends the first wait.
wait
wait
