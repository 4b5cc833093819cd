//! Whole-system tests: the real program, real machines. See the library for how a test begins and ends.

mod accelerator;
mod base_template;
mod code_interpreter;
mod cpython;
mod e2b_sdk;
mod field_cases;
mod kill_minus_nine;
mod lifecycle;
mod lifecycle_archive;
mod lifecycle_faults;
mod lifecycle_forks;
mod lifecycle_kills;
mod lifecycle_link;
mod lifecycle_randomness;
mod lifecycle_streams;
mod lua;
mod network;
mod package_tools;
mod run;
mod secrets;
mod ssh;
