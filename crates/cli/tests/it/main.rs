//! The `stockade` program, run as users run it.

mod commands;
mod support;
mod usage;
