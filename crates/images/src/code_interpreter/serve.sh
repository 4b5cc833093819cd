#!/bin/sh
# The code interpreter, started again whenever it ends.
while :; do
	python3 -m stockade_code
	sleep 1
done
