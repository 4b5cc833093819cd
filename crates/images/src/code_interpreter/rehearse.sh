#!/bin/sh
# Run by the agent in machines that wait in a pool: the first run of code would have to wait for what this goes through.
exec curl --silent --max-time 25 --request POST http://127.0.0.1:49999/rehearsal
