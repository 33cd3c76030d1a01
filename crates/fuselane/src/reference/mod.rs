//! Each operator again, in plain scalar f64.
