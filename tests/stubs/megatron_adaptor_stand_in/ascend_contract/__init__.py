"""What MindSpeed and MegatronAdaptor have in common, in our own words: both stand-ins are made of it."""
