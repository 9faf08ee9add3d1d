//! A small epoll loop whose registrations own their descriptors.
