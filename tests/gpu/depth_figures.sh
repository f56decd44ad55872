#!/bin/bash
# Every figure of depth on one GPU, in about 150 s: settings of two kernels, rows beside peers, whole models, tests.
# From the checkout's root: bash tests/gpu/depth_figures.sh OUT [timings|tests]; peers are those of python -m tests.peers.
out=${1:?a folder for results}
part=${2:-timings}
mkdir -p "$out"
export PYTHONPATH=.:.cache/peers${PYTHONPATH:+:$PYTHONPATH}
if [ "$part" = timings ]; then
    timeout 55 python tests/gpu/tune_streams.py > "$out/tune.txt" 2>&1
    mixers=$(for m in mhc jpmhc dynamic-hyper-connections hyper-connections ihc residual mhc-lite; do echo --mixer $m; done)
    COLUMNS=200 timeout 50 python -m axes bench depth $mixers --who axes --who Liger --who TransformerEngine --out "$out/bench" \
        > "$out/depth.txt" 2>&1
    COLUMNS=200 timeout 45 python -m axes bench training --who axes --depth hyper-connections --depth mhc --steps 10 \
        --out "$out/bench" > "$out/training.txt" 2>&1
    tail -n 90 "$out/tune.txt" "$out/depth.txt" "$out/training.txt"
else
    timeout 145 python -m pytest -q -n 12 -p no:cacheprovider tests/gpu/test_streams.py tests/gpu/test_depth.py 2>&1 \
        | tee "$out/tests.txt" | tail -n 25
fi
