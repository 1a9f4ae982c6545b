#!/bin/bash
# On every host, with the same arguments: torchrun.sh FIRST_HOST NUM_HOSTS RANKS_HERE TOPOLOGY.
# Hosts may have different numbers of ranks; together they must be the topology's.
set -euo pipefail
first=$1 hosts=$2 here=$3 topology=$4
exec torchrun --nnodes "$hosts" --nproc-per-node "$here" \
  --rdzv-backend c10d --rdzv-id sumgrad --rdzv-endpoint "$first:${PORT:-29500}" \
  -m sumgrad.run --topology "$topology" --out "sumgrad-$(date +%s)" --timeout 300
