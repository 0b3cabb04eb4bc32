#!/usr/bin/env bash
# Measure everything in records/ again, on a machine with an NVIDIA GPU (about 35 minutes on an H200).
# Each command goes on where it was if it is started again; checkpoints are made once, in CHECKPOINTS.
# Needs 60 GB of disk, 60 GB of RAM and, for all models side by side, 100 GB of GPU memory.
set -euo pipefail
out=${1:?usage: scripts/records.sh FOLDER [CHECKPOINTS]}
checkpoints=${2:-${TMPDIR:-/tmp}/pleviz-checkpoints}
python=${PYTHON:-python3}
mkdir -p "$out" "$checkpoints"

models=(gemma-4-E4B gemma-4-E2B gemma-3n-E4B gemma-3n-E2B)
all=$(IFS=,; echo "${models[*]}")
speed=(--prefill 8500 --decode 128 --batch 1,64 --keep "$checkpoints")

for family in gemma-4 gemma-3n; do
  "$python" -m pleviz measure --model "$family-E4B,$family-E2B" --precision bf16,nf4 "${speed[@]}" \
    --segment-seconds 0.5 --homes gpu,cpu,mapped,device_map,workaround --out "$out/h200-$family.json"
done
"$python" -m pleviz measure --model "$all" --precision fp16,int8 --homes gpu,cpu,mapped \
  --only-memory --keep "$checkpoints" --out "$out/h200-memory.json"
# torch.compile of the workaround breaks the graph at the table and takes minutes
"$python" -m pleviz measure --model gemma-4-E4B,gemma-3n-E4B --precision bf16 --compiled "${speed[@]}" \
  --homes gpu,mapped,file,workaround --row-timeout 900 --out "$out/h200-compiled.json"
"$python" -m pleviz bench --model gemma-4-E4B --checkpoint "$checkpoints/gemma-4-E4B-real" \
  --out "$out/h200-homes.json"
"$python" -m pleviz.watch --out "$out/h200-move.json"
"$python" -m pleviz greedy --tokens 2287 --out "$out/h200-greedy.json" \
  $(printf -- "--checkpoint %s=$checkpoints/%s-real " $(for m in "${models[@]}"; do echo "$m" "$m"; done))
