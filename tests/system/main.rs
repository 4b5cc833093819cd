//! Whole-system tests: the real program, real machines. See the library for how a test begins and ends.

mod base_template;
mod cpython;
mod e2b_sdk;
mod field_cases;
mod kill_minus_nine;
mod lua;
mod run;
