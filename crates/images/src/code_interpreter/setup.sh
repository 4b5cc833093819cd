# Runs as root inside the root file system of `base`, after its own setup. What was fetched is in
# /tmp/code-interpreter.
set -eu

python3 -m pip install --quiet --no-index --find-links /tmp/code-interpreter/fetched \
	--no-deps --require-hashes --requirement /tmp/code-interpreter/requirements.txt

# Libraries' own tests are as large as many of the libraries.
packages=/usr/local/lib/python3.11/dist-packages
for library in matplotlib numpy pandas scipy sklearn sympy; do
	find "$packages/$library" -type d -name tests -prune -exec rm -rf {} +
done

cp -r /tmp/code-interpreter/stockade_code "$packages/"
find "$packages/stockade_code" -type d -exec chmod 0755 {} + -o -type f -exec chmod 0644 {} +
python3 -m compileall -q "$packages/stockade_code"
for kernel in /tmp/code-interpreter/kernels/*.json; do
	directory=/usr/local/share/jupyter/kernels/$(basename "$kernel" .json)
	mkdir -p "$directory"
	install -m 0644 "$kernel" "$directory/kernel.json"
done
install -m 0755 /tmp/code-interpreter/serve.sh /usr/local/bin/stockade-code-interpreter
install -D -m 0755 /tmp/code-interpreter/rehearse.sh /usr/local/lib/stockade/rehearsal

# Fonts are searched once, here; every kernel finds the result.
mkdir -p /root/.cache
python3 -c 'import matplotlib.font_manager'

find /usr/local -type d -exec chmod 0777 {} +
rm -rf /tmp/code-interpreter /tmp/* /var/log/*
mkdir -p /var/log/apt
