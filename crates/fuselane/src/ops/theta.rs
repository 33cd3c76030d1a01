//! Frequency schedules.
