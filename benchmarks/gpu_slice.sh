#!/usr/bin/env bash
# A slice of a benchmark on a GPU host: no longer than SECONDS, and nothing that was measured is lost.
#
#   benchmarks/gpu_slice.sh SECONDS micro.py --set rmsnorm
#   benchmarks/gpu_slice.sh SECONDS e2e.py --model flux --parts step
#
# build/ must hold the CUDA variant (`make build-cuda`, on any machine); its metadata says which commit was measured, so
# build what is committed (LTX_KERNELS_COMMIT=<hash> overrides). Peers (liger-kernel, quack, flashinfer), diffusers
# and transformers are taken where Python finds them: put them on PYTHONPATH. Each script writes its JSON to
# benchmarks/results/<chip>/ after each problem; where OUT is set, all of that is packed into $OUT/results.tgz in the end
# (one file: a host may send only a few home), an interrupted slice's too. The same slice again, with its JSON in place,
# goes on where it stopped.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${1:?seconds, script, arguments}
script=benchmarks/${2:?script, arguments}
shift 2
status=0
timeout --signal=INT --kill-after=20 "$seconds" python3 "$script" "$@" || status=$?
if [ -n "${OUT:-}" ]; then tar -czf "$OUT/results.tgz" benchmarks/results; fi
if [ "$status" = 124 ]; then echo "stopped after $seconds s: the same slice again goes on" >&2; fi
exit "$status"
