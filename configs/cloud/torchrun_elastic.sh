#!/bin/bash
# A run that outlives its machines: start this line on each of them, and again on one that died and came back.
#   HOST=first-machine NODES=2 GPUS=8 bash configs/cloud/torchrun_elastic.sh src/10_fsdp.py --runs_dir /shared/runs
# When a rank dies, torchrun ends the others, waits until NODES machines are there, and starts all ranks again, which go
# on from the newest checkpoint. NODES=1:2 goes on with one machine meanwhile. HOST keeps the list of machines: if it
# dies itself, start all of them again. All machines must see the same --runs_dir.

set -euo pipefail
# torch 2.13 shares the store of the first round and tells its address once: a machine that comes later waits in vain
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun \
    --nnodes="${NODES:-2}" --nproc-per-node="${GPUS:-gpu}" --max-restarts="${RESTARTS:-3}" \
    --rdzv-backend=c10d --rdzv-id="${JOB:-fabric-ladder}" --rdzv-endpoint="${HOST:?name the first machine}:${PORT:-29500}" \
    ${ADDRESS:+--local-addr="$ADDRESS"} \
    "$1" --save_every 200 --resume auto "${@:2}"
