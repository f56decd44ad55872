#!/bin/bash
# Figures of depth on one GPU, from the checkout's root: bash tests/gpu/depth_figures.sh OUT [rows|models|streams|tune|tests]...
# Peers are those of python -m tests.peers. Kernels are compiled before, by processes side by side, on few tokens.
out=${1:?a folder for results}
shift
mkdir -p "$out"
export PYTHONPATH=.:.cache/peers${PYTHONPATH:+:$PYTHONPATH} COLUMNS=200 PYTHONWARNINGS=ignore
mixers="mhc ihc dynamic-hyper-connections jpmhc hyper-connections residual mhc-lite"
begun=$(date +%s)
said() { echo "== $1: $(($(date +%s) - begun)) s"; }
for part in "${@:-rows}"; do case $part in
rows)  # one sublayer's read and write, beside Liger and TransformerEngine; 110 s
    for mixer in $mixers; do
        timeout 70 python -m axes bench depth --mixer "$mixer" --who axes --who "axes, in a stack" --size 512,2048,4 \
            --out "$out/warm/$mixer" > /dev/null 2>&1 &
    done
    for peer in Liger TransformerEngine; do
        timeout 70 python -m axes bench depth --mixer mhc --who $peer --size 512,2048,4 --out "$out/warm/$peer" > /dev/null 2>&1 &
    done
    wait
    rm -r "$out/warm"
    said "compiled"
    # shellcheck disable=SC2046
    timeout 80 python -m axes bench depth $(printf -- '--mixer %s ' $mixers) --who axes --who "axes, in a stack" --who Liger \
        --out "$out" > "$out/depth.txt" 2>&1
    # its kernels are tuned when they run first
    timeout 45 python -m axes bench depth --mixer mhc --who TransformerEngine --out "$out" >> "$out/depth.txt" 2>&1
    tail -n 40 "$out/depth.txt" ;;
models)  # tokens a second of 12 layers; 100 s
    timeout 150 python -m axes bench training --who axes --depth mhc --depth hyper-connections --depth ihc --steps 10 \
        --apart 4 --patience 80 --out "$out" > "$out/training.txt" 2>&1
    tail -n 20 "$out/training.txt" ;;
streams)  # the same beside streams of bfloat16
    timeout 150 python -m axes bench training --who axes --depth mhc --steps 10 --dtype bfloat16-streams \
        --apart 2 --patience 80 --out "$out/streams" > "$out/streams.txt" 2>&1
    tail -n 20 "$out/streams.txt" ;;
tune)  # settings of launches, each held to float64, and the launches of a sublayer; 60 s
    timeout 130 python tests/gpu/tune_streams.py products sublayer > "$out/tune.txt" 2>&1
    tail -n 90 "$out/tune.txt" ;;
tests)
    timeout 170 python -m pytest -q -n 12 -p no:cacheprovider tests/gpu/test_streams.py tests/gpu/test_depth.py 2>&1 \
        | tee "$out/tests.txt" | tail -n 25 ;;
*)
    echo "$part is none of rows, models, streams, tune, tests" >&2
    exit 2 ;;
esac; said "$part"; done
