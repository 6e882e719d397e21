"""Commands about the catalog itself: init, snapshot, log, restore, gc."""
