//! The `stockade` program, run as users run it.

mod commands;
mod cp;
mod exec;
mod support;
mod usage;
mod waiting;
