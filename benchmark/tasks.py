"""The two tasks on which forced runs are measured in the literature: character sheets and cities.

Both patterns follow the ones published with the method (compressed finite state machines, "Fast JSON Decoding",
LMSYS 2024): fixed keys and layout around short free fields, numbers and choices.
"""

from __future__ import annotations

from dataclasses import dataclass

FIELD = r"[\w\d\s]{1,16}"
CHARACTER = (
    rf'\{{\n    "name": "{FIELD}",\n'
    r'    "house": "(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)",\n'
    r'    "blood status": "(Pure-blood|Half-blood|Muggle-born)",\n'
    r'    "occupation": "(student|teacher|auror|ministry of magic|death eater|order of the phoenix)",\n'
    rf'    "wand": \{{\n        "wood": "{FIELD}",\n        "core": "{FIELD}",\n'
    r'        "length": [0-9]{1,2}\.[0-9]{0,2}\n    \},\n'
    r'    "alive": "(Alive|Deceased)",\n'
    rf'    "patronus": "{FIELD}",\n    "bogart": "{FIELD}"\n\}}'
)
CITY = (
    rf'\{{\n  "name": "{FIELD}",\n  "country": "{FIELD}",\n'
    r'  "latitude": [-+]?[0-9]*\.?[0-9]{0,2},\n  "population": [-+]?[0-9]{1,9},\n'
    rf'  "top 3 landmarks": \["{FIELD}", "{FIELD}", "{FIELD}"\]\n\}}'
)

NAMES = """Harry Potter|Hermione Granger|Ron Weasley|Albus Dumbledore|Severus Snape|Rubeus Hagrid|Draco Malfoy
Minerva McGonagall|Sirius Black|Remus Lupin|Ginny Weasley|Luna Lovegood|Neville Longbottom|Bellatrix Lestrange
Lucius Malfoy|Dobby|Cho Chang|Cedric Diggory|Fred Weasley|George Weasley|Molly Weasley|Arthur Weasley
Percy Weasley|Fleur Delacour|Viktor Krum|Gilderoy Lockhart|Dolores Umbridge|Cornelius Fudge|Alastor Moody
Nymphadora Tonks|Peter Pettigrew|Lily Potter|James Potter|Petunia Dursley|Vernon Dursley|Dudley Dursley
Argus Filch|Filius Flitwick|Pomona Sprout|Sybill Trelawney|Horace Slughorn|Rita Skeeter|Kingsley Shacklebolt
Lavender Brown|Parvati Patil|Padma Patil|Seamus Finnigan|Dean Thomas|Oliver Wood|Angelina Johnson
Katie Bell|Alicia Spinnet|Lee Jordan|Colin Creevey|Moaning Myrtle|Nearly Headless Nick|Peeves|Firenze
Narcissa Malfoy|Vincent Crabbe|Gregory Goyle|Pansy Parkinson|Blaise Zabini|Marcus Flint|Millicent Bulstrode
Bill Weasley|Charlie Weasley|Barty Crouch|Igor Karkaroff|Olympe Maxime|Ludo Bagman|Rufus Scrimgeour|Pius Thicknesse
Aberforth Dumbledore|Ariana Dumbledore|Gellert Grindelwald|Newt Scamander|Bathilda Bagshot|Elphias Doge
Mundungus Fletcher|Garrick Ollivander|Madam Pomfrey|Madam Hooch|Madam Pince|Professor Binns|Professor Quirrell
Nicolas Flamel|Tom Riddle|Merope Gaunt|Marvolo Gaunt|Regulus Black|Kreacher|Winky|Griphook|Aragog|Fawkes
Hedwig|Buckbeak|Crookshanks|Stan Shunpike""".replace("\n", "|").split("|")

# name, country, latitude, population, landmarks
CITIES = [
    line.split("|")
    for line in """Paris|France|48.86|2,100,000|Eiffel Tower, Louvre, Notre-Dame
London|England|51.51|8,900,000|Big Ben, Tower Bridge, British Museum
Rome|Italy|41.90|2,800,000|Colosseum, Pantheon, Trevi Fountain
Berlin|Germany|52.52|3,700,000|Brandenburg Gate, Reichstag, Museum Island
Madrid|Spain|40.42|3,300,000|Prado, Royal Palace, Retiro Park
Lisbon|Portugal|38.72|545,000|Belem Tower, Alfama, Commerce Square
Vienna|Austria|48.21|1,900,000|Hofburg, Prater, Schonbrunn
Prague|Czechia|50.08|1,300,000|Charles Bridge, Old Town Hall, Prague Castle
Budapest|Hungary|47.50|1,700,000|Chain Bridge, Buda Castle, Parliament
Warsaw|Poland|52.23|1,800,000|Royal Castle, Old Town, Lazienki Park
Athens|Greece|37.98|640,000|Acropolis, Parthenon, Plaka
Cairo|Egypt|30.04|10,000,000|Great Pyramid, Egyptian Museum, Khan el-Khalili
Nairobi|Kenya|-1.29|4,400,000|National Park, Karen, Uhuru Park
Cape Town|South Africa|-33.92|4,600,000|Table Mountain, Robben Island, Waterfront
Istanbul|Turkey|41.01|15,500,000|Hagia Sophia, Blue Mosque, Grand Bazaar
Tokyo|Japan|35.68|14,000,000|Tokyo Tower, Senso-ji, Imperial Palace
Kyoto|Japan|35.01|1,460,000|Kinkaku-ji, Fushimi Inari, Nijo Castle
Seoul|South Korea|37.57|9,700,000|Gyeongbokgung, N Tower, Bukchon
Beijing|China|39.90|21,500,000|Forbidden City, Temple of Heaven, Beihai
Shanghai|China|31.23|24,900,000|The Bund, Oriental Pearl, Yu Garden
Delhi|India|28.61|16,800,000|Red Fort, Qutb Minar, India Gate
Mumbai|India|19.08|12,400,000|Gateway, Marine Drive, Elephanta
Bangkok|Thailand|13.76|10,500,000|Grand Palace, Wat Arun, Wat Pho
Singapore|Singapore|1.35|5,900,000|Merlion, Marina Bay, Raffles Hotel
Sydney|Australia|-33.87|5,300,000|Opera House, Harbour Bridge, Bondi
Auckland|New Zealand|-36.85|1,650,000|Sky Tower, Mount Eden, Viaduct
New York|United States|40.71|8,400,000|Central Park, Times Square, Liberty Island
Chicago|United States|41.88|2,700,000|Willis Tower, Millennium Park, Navy Pier
Toronto|Canada|43.65|2,930,000|CN Tower, Casa Loma, High Park
Mexico City|Mexico|19.43|9,200,000|Zocalo, Chapultepec, Fine Arts Palace
Havana|Cuba|23.11|2,100,000|Malecon, El Capitolio, Old Havana
Bogota|Colombia|4.71|7,400,000|Monserrate, Gold Museum, La Candelaria
Lima|Peru|-12.05|10,000,000|Plaza Mayor, Miraflores, Huaca Pucllana
Buenos Aires|Argentina|-34.60|3,100,000|Obelisco, Casa Rosada, La Boca""".splitlines()
]
TEXTS = (
    "{0} is a city in {1}. It lies at a latitude of {2} degrees and has about {3} inhabitants. Visitors come to "
    "see {4}.",
    "With {3} people, {0} is one of the best known cities of {1}. Its latitude is {2}. Among its sights are {4}.",
    "{1} has many cities, and {0} (latitude {2}, population {3}) is famous for {4}.",
)


@dataclass(frozen=True)
class Task:
    """Prompts, the pattern that their answers satisfy, and how long these may get."""

    name: str
    prompts: list[str]
    pattern: str
    max_new_tokens: int = 256


def character_sheets(count: int) -> Task:
    ask = (
        "{} is a character in Harry Potter. Please fill in the following information about this character.\n"
    )
    return Task("character sheet", [ask.format(name) for name in NAMES[:count]], CHARACTER)


def cities(count: int) -> Task:
    ask = (
        "Please extract the information of a city from the following page.\nPage begin.\n{}\nPage end.\n"
        "Here is the name, country, latitude, population and top 3 landmarks of the city in JSON format.\n"
    )
    pages = [text.format(*city) for text in TEXTS for city in CITIES]
    return Task("city", [ask.format(page) for page in pages[:count]], CITY)
