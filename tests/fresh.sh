#!/usr/bin/env bash
# README's two commands, taken from README, in a fresh clone and a fresh virtual environment:  bash tests/fresh.sh
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git clone -q "$root" "$work/onecard"
cd "$work/onecard"
python3 -m venv "$work/venv"
. "$work/venv/bin/activate"
mapfile -t commands < <(grep -E '^    pip install -r requirements' README.md)
[ ${#commands[@]} -eq 2 ] || { echo "README should hold two commands that install, found ${#commands[@]}" >&2; exit 1; }
for command in "${commands[@]}"; do
    echo "\$ $command"
    bash -c "$command"
done
