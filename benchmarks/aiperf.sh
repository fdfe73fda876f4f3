#!/usr/bin/env bash
# A profile of the server by aiperf, which is installed into an environment of its own.
#
# Usage: benchmarks/aiperf.sh [REQUESTS]     (default 40)
#   PYTHON      the Python that decodegrid runs with (default .venv/bin/python)
#   DEPLOYMENT  what is served (default configs/tiny.yaml)
#   PORT        where (default 18100)
#
# Starts the server, lets aiperf send the requests and read /metrics, stops the server, and prints
# the result. Exit status 0 only where every request was answered, /metrics was read and the server
# ended cleanly. Everything is written below build/aiperf/.
set -euo pipefail
cd "$(dirname "$0")/.."

REQUESTS=${1:-40}
PYTHON=${PYTHON:-.venv/bin/python}
DEPLOYMENT=${DEPLOYMENT:-configs/tiny.yaml}
PORT=${PORT:-18100}
VERSION=0.13.0
WORK=$PWD/build/aiperf
OUT=$WORK/result
URL=http://127.0.0.1:$PORT

if [ "$("$WORK/venv/bin/python" -c 'import importlib.metadata as m; print(m.version("aiperf"))' \
  2>/dev/null)" != "$VERSION" ]; then
  echo "installing aiperf $VERSION (a large download)"
  rm -rf "$WORK/venv"
  mkdir -p "$WORK"
  "$PYTHON" -m venv "$WORK/venv"
  "$WORK/venv/bin/python" -m pip install -q --disable-pip-version-check "aiperf==$VERSION"
fi
rm -rf "$OUT" "$WORK/tokenizer"
mkdir -p "$OUT" "$WORK/tokenizer"

# aiperf counts tokens with the model's own tokenizer, read as a plain one.
"$PYTHON" - "$DEPLOYMENT" "$WORK/tokenizer" <<'PY'
import json, shutil, sys
from pathlib import Path
from decodegrid.configs.load import load_config
source, target = load_config(Path(sys.argv[1])).checkpoint_dir, Path(sys.argv[2])
shutil.copy(source / "tokenizer.json", target)
settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
(target / "tokenizer_config.json").write_text(json.dumps(settings))
PY

"$PYTHON" -m decodegrid serve --config "$DEPLOYMENT" --port "$PORT" \
  --set server.model_name=served 2>"$OUT/server.log" &
SERVER=$!
trap 'kill "$SERVER" 2>/dev/null || true' EXIT
until "$PYTHON" -c "import urllib.request; urllib.request.urlopen('$URL/ready')" 2>/dev/null; do
  kill -0 "$SERVER" || { cat "$OUT/server.log" >&2; exit 1; }
  sleep 1
done

# With HF_HUB_OFFLINE set a directory is not taken for a tokenizer.
env -u HF_HUB_OFFLINE "$WORK/venv/bin/aiperf" profile \
  --model served --url "$URL" --endpoint-type chat --streaming \
  --tokenizer "$WORK/tokenizer" --use-server-token-count \
  --concurrency 4 --request-count "$REQUESTS" \
  --synthetic-input-tokens-mean 100 --output-tokens-mean 50 \
  --extra-inputs ignore_eos:true \
  --ui none --artifact-dir "$OUT" >"$OUT/aiperf.log" 2>&1 ||
  { tail -n 40 "$OUT/aiperf.log" >&2; exit 1; }

kill -TERM "$SERVER"
wait "$SERVER"
trap - EXIT

"$PYTHON" - "$OUT" "$REQUESTS" <<'PY'
import json, sys
from pathlib import Path
out, wanted = Path(sys.argv[1]), int(sys.argv[2])
lines = [json.loads(line) for line in (out / "server.log").read_text().splitlines()]
access = [line for line in lines if line["logger"] == "decodegrid.access"]
chats = [line["status"] for line in access if line["path"] == "/v1/chat/completions"]
print(f"answers: {len(chats)}, of which 200: {chats.count(200)}")
result = json.loads(next(out.rglob("profile_export_aiperf.json")).read_text())
for name in ("request_count", "error_request_count", "time_to_first_token", "inter_token_latency",
             "output_sequence_length", "request_latency"):
    if name in result:
        found = result[name]
        print(f"{name}: {found.get('avg')} {found.get('unit')}, p50 {found.get('p50')}")
metrics = [path for path in out.rglob("server_metrics*") if path.stat().st_size]
text = "".join(path.read_text(errors="replace") for path in metrics)
has_read = "vllm:generation_tokens" in text and "decodegrid_graph_hits" in text
print(f"/metrics: {'read' if has_read else 'NOT READ'} ({', '.join(p.name for p in metrics)})")
errors = result.get("error_summary") or []
print(f"errors: {errors}")
sys.exit(not (has_read and not errors and chats.count(200) == len(chats) >= wanted))
PY
