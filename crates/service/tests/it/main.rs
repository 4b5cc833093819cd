//! The service on the fake engine: what it promises, step by step and over restarts.

mod archive;
mod deadlines;
mod faults;
mod forks;
mod idempotency;
mod interrupted;
mod keys;
mod lifecycle;
mod lists;
mod load;
mod meter;
mod pool;
mod random;
mod random_states;
mod restarts;
mod states;
mod support;
