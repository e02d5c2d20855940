//! A program owns its frames.
