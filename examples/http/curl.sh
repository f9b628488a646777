#!/bin/sh
# The HTTP port with curl.
#
# sh examples/http/curl.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8000}
prompt="We have purchase FG-8644, now delivered, 42 pieces, costing 118.48, for a thin wall. =>"

ask() { # route, body
  curl -sS --fail-with-body "$url$1" -H 'content-type: application/json' -d "$2"
  echo
}

curl -sS --fail-with-body "$url/v1/models"
echo
ask /v1/completions "{\"model\": \"json\", \"prompt\": \"$prompt\", \"max_tokens\": 96, \"temperature\": 0}"
ask /v1/chat/completions "{\"model\": \"sql\", \"messages\": [{\"role\": \"user\", \"content\": \"$prompt\"}],
  \"max_tokens\": 96, \"temperature\": 0, \"speculation\": \"prompt_lookup\"}"
