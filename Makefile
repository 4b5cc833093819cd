# make up      install what is missing, build, put `stockade` on the path, make the base template, serve and try a
#              first sandbox
# make test    install what is missing, run all tests
# make check   format, lints, dependencies, generated files
# make build   the release binary: target/release/stockade
#
# UP_ARGS goes to `stockade up`:  make up UP_ARGS="--http 0.0.0.0:8080"

UP_ARGS =

.PHONY: up test check build link packages

up: packages build link
	exec target/release/stockade up $(UP_ARGS)

packages:
	@scripts/packages

build:
	cargo build --release --package stockade-cli --bin stockade

link: build
	@scripts/link

test:
	@scripts/test

check:
	@scripts/check
