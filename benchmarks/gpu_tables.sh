#!/usr/bin/env bash
# The tables that issues 2 and 3 ask for, on a GPU host: about six minutes each, and no more than SECONDS.
#
#   benchmarks/gpu_tables.sh issue2 [SECONDS]      RMSNorm forward and backward, host time
#   benchmarks/gpu_tables.sh issue3 [SECONDS]      every forward op at the sizes of LTX-Video 2B and 13B
#
# build/ must hold the CUDA variant (`make build-cuda`, on any machine). Peers (liger-kernel, quack, flashinfer) are timed
# where Python finds them: put them on PYTHONPATH. The JSON goes to benchmarks/results/<chip>/<set>.json and, where OUT is
# set, there too. Run again with that file in place, it goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
set_name=${1:?issue2 or issue3}
seconds=${2:-360}
status=0
python3 benchmarks/micro.py --set "$set_name" --max-seconds "$seconds" || status=$?
if [ -n "${OUT:-}" ]; then cp -r benchmarks/results "$OUT/"; fi
exit "$status"
