//! Integration tests against a real KVM, by intent.
