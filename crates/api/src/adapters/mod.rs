//! Other systems' APIs on our server, each under a host label of its own because their paths collide.

pub mod e2b;
